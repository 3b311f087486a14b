"""The paper's nine single tables (Datasets I): what each one is, down to rows, columns and class counts.

Sources: the paper's tables "Dataset Sources" and "Details of Datasets". The counts here are the data's own: several of
the paper's row totals are one too high, and it counts Spambase's class among its 58 features. No rows here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bishop_ray.errors import UnknownName


@dataclass(frozen=True)
class PaperSet:
    """One of the nine tables.

    Attributes:
        columns: Names in the original's order, the target last.
        classes: Rows per class.
        url: Where the original is.
        categorical: The columns that are categories; all others are numbers.
        openml: OpenML data id of the same rows, None where OpenML has them in no complete form.
        drop: Columns of the original that are no features (numbers and names of customers).
        aliases: Other names of columns in known copies, in lower case.
        missing: The text of an empty category cell; "" where there is none.
        complete: Rows whose cell in this column is blank are dropped, as the paper does.
        rotate: So many rows of OpenML's copy go from its start to its end.
        mean: A column and its mean: a recoded or invented copy rarely has it.
        part: Rows per class of a known part of the table, which is accepted with a note.
    """

    columns: tuple[str, ...]
    classes: dict[str, int]
    url: str
    categorical: tuple[str, ...] = ()
    openml: int | None = None
    drop: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    complete: str = ""
    rotate: int = 0
    mean: tuple[str, float] | None = None
    part: dict[str, int] | None = None

    @property
    def target(self) -> str:
        """The target column."""
        return self.columns[-1]

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return sum(self.classes.values())

    @property
    def task(self) -> str:
        """The task type."""
        return "binary" if len(self.classes) == 2 else "multiclass"

    @property
    def numerical(self) -> tuple[str, ...]:
        """The columns that are numbers."""
        return tuple(c for c in self.columns[:-1] if c not in self.categorical)


def paper_set(name: str) -> PaperSet:
    """The record of a name.

    Raises:
        UnknownName: None of the nine.
    """
    if name not in PAPER_SETS:
        raise UnknownName("dataset of the paper", name, PAPER_SETS)
    return PAPER_SETS[name]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PAPER_SETS: dict[str, PaperSet] = {
    "adult": PaperSet(
        columns=_words(
            "age workclass fnlwgt education educational-num marital-status occupation relationship race gender "
            "capital-gain capital-loss hours-per-week native-country income"
        ),
        categorical=_words("workclass education marital-status occupation relationship race gender native-country"),
        classes={"<=50K": 37155, ">50K": 11687},
        openml=1590,
        url="archive.ics.uci.edu/dataset/2/adult",
        missing="?",
        aliases={"sex": "gender", "education-num": "educational-num", "class": "income"},
        mean=("age", 38.643585),
    ),
    "bank": PaperSet(
        columns=_words(
            "age job marital education default balance housing loan contact day month duration campaign pdays "
            "previous poutcome y"
        ),
        categorical=_words("job marital education default housing loan contact month poutcome"),
        classes={"no": 39922, "yes": 5289},
        openml=1461,
        url="archive.ics.uci.edu/dataset/222/bank+marketing",
        aliases={"class": "y", "deposit": "y"},
        mean=("balance", 1362.272058),
    ),
    "blastchar": PaperSet(
        columns=_words(
            "gender SeniorCitizen Partner Dependents tenure PhoneService MultipleLines InternetService OnlineSecurity "
            "OnlineBackup DeviceProtection TechSupport StreamingTV StreamingMovies Contract PaperlessBilling "
            "PaymentMethod MonthlyCharges TotalCharges Churn"
        ),
        categorical=_words(
            "gender SeniorCitizen Partner Dependents PhoneService MultipleLines InternetService OnlineSecurity "
            "OnlineBackup DeviceProtection TechSupport StreamingTV StreamingMovies Contract PaperlessBilling "
            "PaymentMethod"
        ),
        classes={"No": 5163, "Yes": 1869},
        openml=42178,
        url="www.kaggle.com/blastchar/telco-customer-churn",
        drop=("customerID",),
        complete="TotalCharges",
        mean=("MonthlyCharges", 64.798208),
    ),
    "income": PaperSet(
        columns=_words(
            "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
            "capital-gain capital-loss hours-per-week native-country income"
        ),
        categorical=_words("workclass education marital-status occupation relationship race sex native-country"),
        classes={"<=50K": 37155, ">50K": 11687},
        openml=1590,
        url="archive.ics.uci.edu/dataset/2/adult",
        missing="?",
        aliases={"gender": "sex", "educational-num": "education-num", "class": "income"},
        mean=("age", 38.643585),
        rotate=16281,
    ),
    "seismic_bumps": PaperSet(
        columns=_words(
            "seismic seismoacoustic shift genergy gpuls gdenergy gdpuls ghazard nbumps nbumps2 nbumps3 nbumps4 "
            "nbumps5 nbumps6 nbumps7 nbumps89 energy maxenergy class"
        ),
        categorical=_words("seismic seismoacoustic shift ghazard"),
        classes={"0": 2414, "1": 170},
        url="archive.ics.uci.edu/dataset/266/seismic+bumps",
        mean=("genergy", 90242.52322),
    ),
    "shrutime": PaperSet(
        columns=_words(
            "CreditScore Geography Gender Age Tenure Balance NumOfProducts HasCrCard IsActiveMember EstimatedSalary "
            "Exited"
        ),
        categorical=_words("Geography Gender HasCrCard IsActiveMember"),
        classes={"0": 7963, "1": 2037},
        url="www.kaggle.com/shrutimechlearn/churn-modelling",
        drop=("RowNumber", "CustomerId", "Surname"),
        mean=("EstimatedSalary", 100090.239881),
    ),
    "spambase": PaperSet(
        columns=_words(
            "word_freq_make word_freq_address word_freq_all word_freq_3d word_freq_our word_freq_over "
            "word_freq_remove word_freq_internet word_freq_order word_freq_mail word_freq_receive word_freq_will "
            "word_freq_people word_freq_report word_freq_addresses word_freq_free word_freq_business word_freq_email "
            "word_freq_you word_freq_credit word_freq_your word_freq_font word_freq_000 word_freq_money word_freq_hp "
            "word_freq_hpl word_freq_george word_freq_650 word_freq_lab word_freq_labs word_freq_telnet word_freq_857 "
            "word_freq_data word_freq_415 word_freq_85 word_freq_technology word_freq_1999 word_freq_parts "
            "word_freq_pm word_freq_direct word_freq_cs word_freq_meeting word_freq_original word_freq_project "
            "word_freq_re word_freq_edu word_freq_table word_freq_conference char_freq_; char_freq_( char_freq_[ "
            "char_freq_! char_freq_$ char_freq_# capital_run_length_average capital_run_length_longest "
            "capital_run_length_total spam"
        ),
        classes={"0": 2788, "1": 1813},
        openml=44,
        url="archive.ics.uci.edu/dataset/94/spambase",
        aliases={"class": "spam"},
        mean=("word_freq_you", 1.6621),
    ),
    "qsar_biodeg": PaperSet(
        columns=_words(
            "SpMax_L J_Dz(e) nHM F01[N-N] F04[C-N] NssssC nCb- C% nCp nO F03[C-N] SdssC HyWi_B(m) LOC SM6_L F03[C-O] "
            "Me Mi nN-N nArNO2 nCRX3 SpPosA_B(p) nCIR B01[C-Br] B03[C-Cl] N-073 SpMax_A Psi_i_1d B04[C-Br] SdO TI2_L "
            "nCrt C-026 F02[C-N] nHDon SpMax_B(m) Psi_i_A nN SM6_B(m) nArCOOR nX experimental_class"
        ),
        classes={"NRB": 699, "RB": 356},
        openml=1494,
        url="archive.ics.uci.edu/dataset/254/qsar+biodegradation",
        aliases={"class": "experimental_class"},
        mean=("SpMax_L", 4.782644),
    ),
    "jannis": PaperSet(
        columns=(*(f"V{i}" for i in range(1, 55)), "class"),
        classes={"0": 1687, "1": 28790, "2": 14734, "3": 38522},
        part={"0": 607, "1": 10365, "2": 5304, "3": 13869},
        openml=41168,
        url="www.openml.org/d/41168",
    ),
}
"""By name, in the paper's order."""
