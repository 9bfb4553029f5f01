# Made from the table in __init__.py: python tests/vtk/_stub.py --write

from vtk.analysis.analyze import analyze as analyze
from vtk.analysis.config import AnalyzeConfig as AnalyzeConfig
from vtk.answers import evaluate as evaluate
from vtk.answers import predict as predict
from vtk.bank.bank import TaskBank as TaskBank
from vtk.branches.config import ParallelizeConfig as ParallelizeConfig
from vtk.branches.join import parallelize as parallelize
from vtk.card import Card as Card
from vtk.data.audit.folder_scan import scan as scan
from vtk.data.audit.report import audit as audit
from vtk.data.config import AuditConfig as AuditConfig
from vtk.evaluation.config import EvalConfig as EvalConfig
from vtk.evaluation.config import PredictConfig as PredictConfig
from vtk.evaluation.labels import Prediction as Prediction
from vtk.fused.build import fuse as fuse
from vtk.models.module import create_model as create_model
from vtk.packs.load import Task as Task
from vtk.packs.load import load_checkpoint as load_checkpoint
from vtk.packs.load import load_task as load_task
from vtk.packs.merge import merge_task as merge_task
from vtk.packs.pack import save_task as save_task
from vtk.profiling.config import ProfileConfig as ProfileConfig
from vtk.profiling.profile import profile as profile
from vtk.profiling.regression import compare_profiles as compare_profiles
from vtk.profiling.server.config import ServerConfig as ServerConfig
from vtk.profiling.server.drive import profile_server as profile_server
from vtk.profiling.sizes import profile_sizes as profile_sizes
from vtk.runtime.backends.base import load_backend as load_backend
from vtk.runtime.opening import open_source as open_source
from vtk.runtime.source import Opening as Opening
from vtk.runtime.source import Source as Source
from vtk.training.engine.callbacks import Callback as Callback
from vtk.training.engine.callbacks import EpochInfo as EpochInfo
from vtk.training.engine.callbacks import EpochStart as EpochStart
from vtk.training.engine.callbacks import SaveInfo as SaveInfo
from vtk.training.engine.callbacks import StepInfo as StepInfo
from vtk.training.finetune import finetune as finetune
from vtk.training.finetune import finetune_tasks as finetune_tasks
from vtk.training.finetune_config import FinetuneConfig as FinetuneConfig
from vtk.training.pretrain.config import PretrainConfig as PretrainConfig
from vtk.training.pretrain.run import pretrain as pretrain
from vtk.training.train import train as train
from vtk.training.train_config import TrainConfig as TrainConfig
from vtk_export.aoti.config import AotiConfig as AotiConfig
from vtk_export.aoti.export import export_aoti as export_aoti
from vtk_export.onnx.config import OnnxConfig as OnnxConfig
from vtk_export.onnx.export import export_onnx as export_onnx
from vtk_export.tasks.config import TasksConfig as TasksConfig
from vtk_export.tasks.export import export_tasks as export_tasks
from vtk_export.tensorrt.config import TensorrtConfig as TensorrtConfig
from vtk_export.tensorrt.export import export_tensorrt as export_tensorrt
from vtk_export.triton.config import TritonConfig as TritonConfig
from vtk_export.triton.export import export_triton as export_triton

__version__: str
__all__: list[str]
